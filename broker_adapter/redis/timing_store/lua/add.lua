#!lua
-- Sets when rows are due, and wakes workers where one is due before all others.
--
-- Keys:      1  due: a sorted set, row by the time it is due, in microseconds since the Unix epoch
-- Arguments: 1  the channel of wake-ups  2  `NX` to set only rows that have no time, else `CH`
--            then for each row its time and its name
-- Returns:   how many times were set
-- Invariant: a row has one time. A full server refuses this script, and runs all others.

local first = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2]
local earliest = tonumber(ARGV[3])
for at = 5, #ARGV, 2 do
    earliest = math.min(earliest, tonumber(ARGV[at]))
end
local set = redis.call('ZADD', KEYS[1], ARGV[2], unpack(ARGV, 3))
if not first or earliest < tonumber(first) then
    redis.call('PUBLISH', ARGV[1], '')
end
return set
