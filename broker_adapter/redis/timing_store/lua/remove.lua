#!lua flags=allow-oom
-- Removes rows whose time has not changed since they were listed.
--
-- Keys:      1  due
-- Arguments: for each row its name and the time that it was listed with
-- Returns:   how many were removed
-- Invariant: a row whose time is another one was set, taken or settled since then, and stays.

local removed = 0
for at = 1, #ARGV, 2 do
    local due_us = redis.call('ZSCORE', KEYS[1], ARGV[at])
    if due_us and tonumber(due_us) == tonumber(ARGV[at + 1]) then
        removed = removed + redis.call('ZREM', KEYS[1], ARGV[at])
    end
end
return removed
