#!lua flags=no-writes
-- Counts what is in a slot and where a group stands.
--
-- Keys:      those of the slot; with those of a group, its own figures, too
-- Arguments: none
-- Returns:   how many came to the log, how many are in the store; of a group also how many are to be delivered, in
--            flight and dead, and the age in ms of the oldest that is not acknowledged, among the first 1,000 of each set.
--            NOGROUP where the group was not declared.
-- Invariant: changes nothing.

local answer = {tonumber(redis.call('HGET', meta, 'logged') or 0), redis.call('ZCARD', store)}
if not config then
    return answer
end
local position = redis.call('HGET', config, 'position')
if not position then
    return redis.error_reply('NOGROUP there is no such group')
end
local behind = '(' .. position
local oldest_us = redis.call('ZRANGE', log, behind, '+inf', 'BYSCORE', 'LIMIT', 0, 1, 'WITHSCORES')[2] or now_us
for _, key in ipairs({retry, prepare}) do
    for _, id in ipairs(redis.call('ZRANGE', key, 0, 999)) do
        oldest_us = math.min(oldest_us, redis.call('ZSCORE', log, id))
    end
end
answer[3] = redis.call('ZCOUNT', log, behind, '+inf') + redis.call('ZCARD', retry)
answer[4] = redis.call('ZCARD', prepare)
answer[5] = redis.call('ZCARD', dead)
answer[6] = math.max(0, math.floor((now_us - oldest_us) / 1000))
return answer
