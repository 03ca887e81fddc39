#!lua
-- Adds messages to a slot: to the store, or to the log where they are due, and nothing in the store is due before them;
-- leaves out repeats. Wakes consumers where one is due, or before all others in the store.
--
-- Keys:      those of the slot
-- Arguments: 1  how long ids are remembered, in ms  2  the latest time in ms that it may be now
--            3  the channel of wake-ups
--            then for each message its id, its due time in ms (0: now), and its body
-- Returns:   for each message in order 1 (added, or canceled before it came) or 0 (repeat)
-- Invariant: an id is added if it has no body here and was neither added nor canceled within the window. It writes
--            always, so that a WAIT behind it waits for a repeat's message, too. Messages with equal due times keep the
--            order in which they were added.

bound_now(ARGV[2])

-- Where in the store a message due at a millisecond stands: behind all that were added for it before. Sets order equal
-- scores by member, so each gets a quarter of a microsecond of its own, which numbers of this size still tell apart. The
-- 4,001st of a millisecond goes behind those of the next: late by that, never early, and still behind the ones before.
-- Full milliseconds are passed once a call, not once a message.
local reached = {}
local function place_of(due_us)
    local from_us = reached[due_us] or due_us
    while true do
        local last = redis.call(
            'ZRANGE', store, string.format('(%.0f', from_us + 1000), from_us, 'BYSCORE', 'REV', 'LIMIT', 0, 1, 'WITHSCORES')[2]
        if not last or last + 0.25 < from_us + 1000 then
            reached[due_us] = from_us
            return last and last + 0.25 or from_us
        end
        from_us = from_us + 1000
    end
end

local window_us = ARGV[1] * 1000
local results, due_ids = {}, {}
local first = redis.call('ZRANGE', store, 0, 0, 'WITHSCORES')[2]
local first_us = first and tonumber(first) or math.huge
local is_sooner = false
local is_behind = first_us <= now_us -- those are moved to the log by the next pull: what is due now comes behind them
for at = 4, #ARGV, 3 do
    local id, due_us = ARGV[at], ARGV[at + 1] * 1000
    local added_us = redis.call('ZSCORE', ids, id)
    if (added_us and tonumber(added_us) > now_us - window_us) or redis.call('HEXISTS', body, id) == 1 then
        results[#results + 1] = 0
    else
        results[#results + 1] = 1
        redis.call('ZADD', ids, now_us, id)
        local canceled_us = redis.call('ZSCORE', canceled, id)
        if not canceled_us or tonumber(canceled_us) <= now_us - window_us then
            redis.call('ZREM', canceled, id)
            redis.call('HSET', body, id, ARGV[at + 2])
            if due_us > now_us or is_behind then
                due_us = due_us > 0 and due_us or math.floor(now_us / 1000) * 1000
                redis.call('ZADD', store, place_of(due_us), id)
                is_sooner = is_sooner or due_us < first_us or is_behind
            else
                due_ids[#due_ids + 1] = id
            end
        end
    end
end
log_in_order(due_ids)
trim(ids, window_us, 2 * #results + 100)
trim(canceled, window_us, 2 * #results + 100)
if #due_ids > 0 or is_sooner then
    redis.pcall('PUBLISH', ARGV[3], '') -- a user without the right to it has consumers that ask more often
end
return results
