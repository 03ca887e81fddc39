#!lua flags=allow-oom
-- Ends deliveries whose deadline has passed: to retry, visible at once, or to dead where their attempts are used up.
--
-- Keys:      those of the slot and the group
-- Arguments: 1  how many at most  2  the reason
-- Returns:   ms until the next deadline, -1 where nothing is in flight
-- Invariant: a receipt stays valid for an ack until its message is delivered again.

for _, id in ipairs(due(prepare, ARGV[1])) do
    fail(id, state_of(id), ARGV[2], redis.call('ZSCORE', prepare, id))
end
return ms_until_first(prepare)
