#!lua flags=allow-oom
-- Moves the deadlines of deliveries, and notes which of them their consumer begins.
--
-- Keys:      those of the slot and the group
-- Arguments: 1  invisible time from now on, in ms  2  1 if the consumer begins to handle them, else 0
--            then for each receipt its epoch and id
-- Returns:   for each in order 1 (extended) or 3 (stale)
-- Invariant: a delivery that is not the newest one of its message moves nothing.

local results = {}
for at = 3, #ARGV, 2 do
    local found = delivery_of(ARGV[at + 1], ARGV[at])
    if found then
        if ARGV[2] == '1' then
            found[5] = 1
            set_state(ARGV[at + 1], found)
        end
        redis.call('ZADD', prepare, now_us + ARGV[1] * 1000, ARGV[at + 1])
    end
    results[#results + 1] = found and 1 or 3
end
return results
