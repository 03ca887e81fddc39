#!lua flags=allow-oom
-- Delivers to a group: what is to be tried again, and the log behind the group's position. Where both wait, at least half
-- is from the log, and a pull of one alternates; what one leaves goes to the other.
--
-- Keys:      those of the slot and the group
-- Arguments: 1  how many at most  2  invisible time in ms  3  bytes of bodies behind which no further one is taken
-- Returns:   ms until the next one in retry is visible (-1: none), the epoch of these deliveries, then for each its id,
--            attempt and body. NOGROUP where the group was not declared. A paused group gets nothing.
-- Invariant: each id that is returned is in prepare with this epoch, which no other delivery of it has.

local position, paused = unpack(redis.call('HMGET', config, 'position', 'paused'))
if not position then
    return redis.error_reply('NOGROUP there is no such group')
end
local limit, answer, bytes = tonumber(ARGV[1]), {-1, now_us}, 0
if paused == '1' then
    return answer
end
local deadline_us = now_us + ARGV[2] * 1000

local function deliver(id)
    local message = redis.call('HGET', body, id)
    local found = state_of(id) or {0, 0, {}}
    found[1], found[2] = now_us, found[2] + 1
    set_state(id, found)
    redis.call('ZADD', prepare, deadline_us, id)
    bytes = bytes + #message
    answer[#answer + 1] = id
    answer[#answer + 1] = found[2]
    answer[#answer + 1] = message
end

local again = due(retry, limit)
local new = redis.call('ZRANGE', log, '(' .. position, '+inf', 'BYSCORE', 'LIMIT', 0, limit, 'WITHSCORES')
local both_wait = #again > 0 and #new > 0
local fresh_next = redis.call('HGET', config, 'fresh_next') == '1'
local again_share = limit > 1 and math.floor(limit / 2) or 1
local next_again, next_new = 1, 1
for _ = 1, limit do
    local is_fresh = new[next_new] and (fresh_next or not again[next_again] or next_again > again_share)
    if bytes >= tonumber(ARGV[3]) or not (is_fresh or again[next_again]) then break end
    if is_fresh then
        deliver(new[next_new])
        position = new[next_new + 1]
        next_new = next_new + 2
    else
        redis.call('ZREM', retry, again[next_again])
        deliver(again[next_again])
        next_again = next_again + 1
    end
    fresh_next = not is_fresh
end
if next_new > 1 then
    redis.call('HSET', config, 'position', position)
end
if both_wait then -- a pull of one, or of one large body, is followed by one of the other kind
    redis.call('HSET', config, 'fresh_next', fresh_next and '1' or '0')
end
answer[1] = ms_until_first(retry)
return answer
