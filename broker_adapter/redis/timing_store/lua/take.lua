#!lua flags=allow-oom
-- Takes rows that are due, or will be soon: their time becomes the end of the taker's lease.
--
-- Keys:      1  due  2  generation: a string, missing where timers were lost, `building/<name>` during a rebuild
-- Arguments: 1  how many at most  2  the lease, in ms  3  how long before its time a row may be taken, in ms
-- Returns:   the generation (empty: missing), ms until the next row can be taken (-1: there is none), for how many ms the
--            first was due, the end of the lease, which names this take, and the rows
-- Invariant: a row is never taken sooner than that before its time by this server's clock, nor by two takers within a lease.

local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local until_us = now_us + ARGV[3] * 1000
local lease_us = string.format('%.0f', now_us + ARGV[2] * 1000)
local found = redis.call('ZRANGE', KEYS[1], '-inf', until_us, 'BYSCORE', 'LIMIT', 0, ARGV[1], 'WITHSCORES')
local answer = {redis.call('GET', KEYS[2]) or '', -1, 0, lease_us}
local leased = {}
for at = 1, #found, 2 do
    leased[#leased + 1] = lease_us
    leased[#leased + 1] = found[at]
    answer[#answer + 1] = found[at]
end
if #found > 0 then
    answer[3] = math.max(0, math.floor((now_us - found[2]) / 1000))
    redis.call('ZADD', KEYS[1], 'XX', unpack(leased))
end
local first = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2]
if first then
    answer[2] = math.max(0, math.ceil((first - until_us) / 1000))
end
return answer
