-- Remove entries of dead incarnations, by cursor. KEYS: blocks, stream, taken, told
-- ARGV: cursor, count, most stream entries, then per dead incarnation its code and the entry that says it was swept
-- What remains known of one is taken away with its last entry, so that one that comes back is never forgotten half.
-- Returns the next cursor.
local dead, words, counts = {}, {}, {}
for i = 4, #ARGV, 2 do
  local code = ARGV[i]
  local held = redis.call('HGET', KEYS[3], code)
  local seq, count, xor = 0, 0, string.rep('\0', 16)
  if held and #held < 32 then held = false end
  if held then seq, count, xor = struct.unpack('<I8I8c16', held) end
  dead[code] = {seq = seq, count = count, words = {struct.unpack('>I4I4I4I4', xor)}, swept = ARGV[i + 1], known = held}
end
local page = redis.call('HSCAN', KEYS[1], ARGV[1], 'COUNT', ARGV[2])
for i = 1, #page[2], 2 do
  local key, places, rest = page[2][i], page[2][i + 1], {}
  for at = 1, #places, 9 do
    local known = dead[string.sub(places, at, at + 7)]
    if known then
      local t, k = string.byte(places, at + 8), {struct.unpack('>I4I4I4I4', key)}
      for j = 0, 3 do known.words[j + 1] = bit.bxor(known.words[j + 1], k[(j + t) % 4 + 1]) end
      known.count = known.count - 1
    else
      rest[#rest + 1] = string.sub(places, at, at + 8)
    end
  end
  if #rest == 0 then
    redis.call('HDEL', KEYS[1], key)
  elseif #rest * 9 < #places then
    redis.call('HSET', KEYS[1], key, table.concat(rest))
  end
end
for code, known in pairs(dead) do
  if page[1] == '0' and known.count <= 0 then
    local told = redis.call('HDEL', KEYS[4], code)
    if redis.call('HDEL', KEYS[3], code) + told > 0 then
      redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[3], '*', 'e', known.swept)
    end
  elseif known.known then
    for j = 1, 4 do known.words[j] = known.words[j] % 4294967296 end
    local xor = struct.pack('>I4I4I4I4', unpack(known.words))
    redis.call('HSET', KEYS[3], code, struct.pack('<I8I8c16', known.seq, math.max(known.count, 0), xor))
  end
end
return page[1]
