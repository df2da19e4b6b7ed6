-- Whose entries are in part of a shard's hash, by cursor. KEYS: blocks. ARGV: cursor, count. Returns {cursor, code, ...}.
local page = redis.call('HSCAN', KEYS[1], ARGV[1], 'COUNT', ARGV[2])
local seen, out = {}, {page[1]}
for i = 2, #page[2], 2 do
  local places = page[2][i]
  for at = 1, #places, 9 do
    local code = string.sub(places, at, at + 7)
    if not seen[code] then
      seen[code] = true
      out[#out + 1] = code
    end
  end
end
return out
