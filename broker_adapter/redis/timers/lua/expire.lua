#!lua flags=allow-oom
-- Ends deliveries whose deadline has passed: to retry, visible at once, or to dead where their attempts are used up. It
-- is an attempt of a message that was delivered alone, or that its consumer began; else the consumer may have died of
-- another one.
--
-- Keys:      those of the slot and the group
-- Arguments: 1  how many at most  2  the reason
-- Returns:   ms until the next deadline, -1 where nothing is in flight
-- Invariant: a receipt stays valid for an ack until its message is delivered again.

for _, id in ipairs(due(prepare, ARGV[1])) do
    local found, deadline_us = state_of(id), redis.call('ZSCORE', prepare, id)
    found[6] = found[5] == 1 and 1 or found[4]
    if found[5] == 1 then
        fail(id, found, ARGV[2], deadline_us)
    else
        found[2] = found[2] - 1
        redis.call('ZREM', prepare, id)
        redis.call('ZADD', retry, deadline_us, id)
        set_state(id, found)
    end
end
return ms_until_first(prepare)
