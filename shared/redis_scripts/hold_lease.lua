-- Take or renew a lease on a role that one process at a time plays. KEYS: lease. ARGV: owner, ttl (ms). Returns who has it.
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then return owner end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return ARGV[1]
