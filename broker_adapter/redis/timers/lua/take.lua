#!lua flags=allow-oom
-- Delivers to a group: what is to be tried again, and the log behind the group's position. Where both wait, at least half
-- is from the log, and a pull of one alternates; what one leaves goes to the other.
--
-- Messages of one delivery whose deadline passed are suspected: one of them may have ended their consumer. To a consumer
-- that does not say which message it begins they are delivered by themselves, half as many together as before, in turn with
-- the log: so the one that ends it is alone after a few deliveries. A pull of several slots leaves them: what it gets from
-- the others would be with them.
--
-- Keys:      those of the slot and the group
-- Arguments: 1  how many at most  2  invisible time in ms  3  bytes of bodies behind which no further one is taken
--            4  1 if the consumer says which message it begins, else 0  5  1 if it is asking other slots, too, else 0
-- Returns:   ms until the next one in retry is visible (-1: none), the epoch of these deliveries, 1 if suspected ones were
--            left for a pull of this slot alone, then for each its id, attempt, body, and 1 if a deadline passed and nobody tried it since, else 0. NOGROUP where the group was not
--            declared. A paused group gets nothing.
-- Invariant: each id that is returned is in prepare with this epoch, which no other delivery of it has.

local position, paused = unpack(redis.call('HMGET', config, 'position', 'paused'))
if not position then
    return redis.error_reply('NOGROUP there is no such group')
end
local limit, answer, bytes = tonumber(ARGV[1]), {-1, now_us, 0}, 0
if paused == '1' then
    return answer
end
local begins, asks_others = ARGV[4] == '1', ARGV[5] == '1'

-- How many of these can be delivered together: those before the first suspected one, or half of a suspected delivery.
local function isolated(again)
    local count, most = 0, nil
    for _, id in ipairs(again) do
        local found = state_of(id) or {}
        local together = found[6] or 0
        local is_suspected = together > 1
        if count == 0 and is_suspected then
            most = math.floor(together / 2)
        elseif is_suspected ~= (most ~= nil) then
            break
        elseif is_suspected then
            most = math.min(most, math.floor(together / 2))
        end
        if most and count >= most then break end
        count = count + 1
    end
    return count, most ~= nil
end

local again = due(retry, limit)
local new = redis.call('ZRANGE', log, '(' .. position, '+inf', 'BYSCORE', 'LIMIT', 0, limit, 'WITHSCORES')
local both_wait = #again > 0 and #new > 0
local fresh_next = redis.call('HGET', config, 'fresh_next') == '1'
local again_share, again_count, are_suspected = limit > 1 and math.floor(limit / 2) or 1, #again, false
if not begins and #again > 0 then
    again_count, are_suspected = isolated(again)
end
if are_suspected and asks_others then
    again_count, are_suspected, both_wait, answer[3] = 0, false, false, 1
elseif are_suspected and both_wait then
    if fresh_next then again_count = 0 else new, again_share = {}, limit end
end

local chosen, next_again, next_new = {}, 1, 1
local turn = fresh_next
for _ = 1, limit do
    local has_again = next_again <= again_count
    local is_fresh = new[next_new] and (turn or not has_again or next_again > again_share)
    if bytes >= tonumber(ARGV[3]) or not (is_fresh or has_again) then break end
    local id = is_fresh and new[next_new] or again[next_again]
    if is_fresh then
        position, next_new = new[next_new + 1], next_new + 2
    else
        redis.call('ZREM', retry, id)
        next_again = next_again + 1
    end
    local message = redis.call('HGET', body, id)
    bytes = bytes + #message
    chosen[#chosen + 1] = {id, message}
    turn = not is_fresh
end

local together = asks_others and math.max(#chosen, 2) or #chosen -- with one from another slot, as far as is known here
local deadline_us, counts = now_us + ARGV[2] * 1000, (together == 1 and not begins) and 1 or 0
for _, one in ipairs(chosen) do
    local id, message = unpack(one)
    local found = state_of(id) or {0, 0, {}}
    local suspects = found[6] or 0
    set_state(id, {now_us, found[2] + 1, found[3], together, counts, suspects})
    redis.call('ZADD', prepare, deadline_us, id)
    for _, value in ipairs({id, found[2] + 1, message, math.min(suspects, 1)}) do
        answer[#answer + 1] = value
    end
end
if next_new > 1 then
    redis.call('HSET', config, 'position', position)
end
if both_wait then -- a pull of one, of one large body, or of suspected ones is followed by one of the other kind
    if are_suspected then turn = not fresh_next end
    redis.call('HSET', config, 'fresh_next', turn and '1' or '0')
end
answer[1] = ms_until_first(retry)
return answer
