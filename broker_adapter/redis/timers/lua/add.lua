#!lua
-- Adds messages to a slot: to the store, or to the log where they are due; leaves out repeats.
--
-- Keys:      those of the slot
-- Arguments: 1  how long ids are remembered, in ms
--            then for each message its id, its due time in ms (0: now), and its body
-- Returns:   for each message in order 1 (added, or canceled before it came) or 0 (repeat)
-- Invariant: an id is added if it has no body here and was not added within the window. It writes always, so that a WAIT
--            behind it waits for a repeat's message, too. Messages with equal due times keep the order of the call.

local window_us = ARGV[1] * 1000
local results, due_ids = {}, {}
for at = 2, #ARGV, 3 do
    local id, due_us = ARGV[at], ARGV[at + 1] * 1000
    local added_us = redis.call('ZSCORE', ids, id)
    if (added_us and tonumber(added_us) > now_us - window_us) or redis.call('HEXISTS', body, id) == 1 then
        results[#results + 1] = 0
    else
        results[#results + 1] = 1
        redis.call('ZADD', ids, now_us, id)
        if not redis.call('ZSCORE', canceled, id) then
            redis.call('HSET', body, id, ARGV[at + 2])
            if due_us > now_us then
                redis.call('ZADD', store, due_us + #results, id)
            else
                due_ids[#due_ids + 1] = id
            end
        end
    end
end
log_in_order(due_ids)
trim(ids, window_us, 2 * #results + 100)
trim(canceled, window_us, 2 * #results + 100)
return results
