#!lua flags=allow-oom
-- Removes rows that were taken, or sets when they are due again.
--
-- Keys:      1  due
-- Arguments: 1  the end of the lease, which names the take
--            then for each row its name and in how many ms it is due again (-1: remove it)
-- Returns:   how many were removed or set
-- Invariant: a row whose time is not that of this take was set or taken by somebody else since then, and stays.

local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local lease_us, settled = tonumber(ARGV[1]), 0
for at = 2, #ARGV, 2 do
    local due_us = redis.call('ZSCORE', KEYS[1], ARGV[at])
    if due_us and tonumber(due_us) == lease_us then
        local later_ms = tonumber(ARGV[at + 1])
        if later_ms < 0 then
            redis.call('ZREM', KEYS[1], ARGV[at])
        else
            redis.call('ZADD', KEYS[1], string.format('%.0f', now_us + later_ms * 1000), ARGV[at])
        end
        settled = settled + 1
    end
end
return settled
