-- What the hash holds of one agent, by cursor. KEYS: blocks. ARGV: cursor, count, code. Returns {cursor, key, tier, ...}.
local page = redis.call('HSCAN', KEYS[1], ARGV[1], 'COUNT', ARGV[2])
local code, out = ARGV[3], {page[1]}
for i = 1, #page[2], 2 do
  local places = page[2][i + 1]
  for at = 1, #places, 9 do
    if string.sub(places, at, at + 7) == code then
      out[#out + 1] = page[2][i]
      out[#out + 1] = string.byte(places, at + 8)
    end
  end
end
return out
