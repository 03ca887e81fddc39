#!lua flags=allow-oom
-- Moves what is due from the store to the log.
--
-- Keys:      those of the slot
-- Arguments: 1  how many at most  2  the latest time in ms that it may be now
-- Returns:   ms until the next one in the store is due, -1 where it is empty
-- Invariant: a message is in the log never before its due time, and in the order of due times within one call.

bound_now(ARGV[2])
local due_ids = due(store, ARGV[1])
if #due_ids > 0 then
    log_in_order(due_ids)
    redis.call('ZREM', store, unpack(due_ids))
end
return ms_until_first(store)
