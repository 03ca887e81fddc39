#!lua flags=allow-oom
-- Delivers to a group: what is to be tried again first, then the log behind the group's position.
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

local taken = 0
for _, id in ipairs(due(retry, limit)) do
    if bytes >= tonumber(ARGV[3]) then break end
    redis.call('ZREM', retry, id)
    deliver(id)
    taken = taken + 1
end
local new = redis.call('ZRANGE', log, '(' .. position, '+inf', 'BYSCORE', 'LIMIT', 0, limit - taken, 'WITHSCORES')
for at = 1, #new, 2 do
    if bytes >= tonumber(ARGV[3]) then break end
    deliver(new[at])
    position = new[at + 1]
end
if #new > 0 then
    redis.call('HSET', config, 'position', position)
end
answer[1] = ms_until_first(retry)
return answer
