#!lua flags=allow-oom
-- Cancels messages that are still in the store, and remembers the ids of those that have not come yet.
--
-- Keys:      those of the slot
-- Arguments: 1  how long ids are remembered, in ms; then the ids
-- Returns:   for each in order 1 (canceled), 2 (too late) or 0 (unknown: if it is added within the window, it is dropped)
-- Invariant: a canceled id is in no place, and a repeat of it within the window is not added. What is remembered is
--            written again by a repeat, so that a WAIT behind it waits for what it repeats.

local results = {}
for at = 2, #ARGV do
    local id = ARGV[at]
    local result = 0
    if redis.call('ZREM', store, id) == 1 then
        redis.call('HDEL', body, id)
        redis.call('ZADD', ids, now_us, id)
        redis.call('ZADD', canceled, now_us, id)
        result = 1
    elseif redis.call('ZSCORE', canceled, id) then
        redis.call('ZADD', canceled, now_us, id)
        result = redis.call('ZSCORE', ids, id) and 1 or 0
    elseif redis.call('HEXISTS', body, id) == 1 or redis.call('ZSCORE', ids, id) then
        result = 2
    else
        redis.call('ZADD', canceled, now_us, id)
    end
    results[#results + 1] = result
end
trim(canceled, ARGV[1] * 1000, 2 * #results + 100)
return results
