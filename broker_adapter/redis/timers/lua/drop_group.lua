#!lua flags=allow-oom
-- Takes a consumer group away, in parts: of each message that it began before, from the oldest on, it is no group any more.
--
-- Keys:      those of the slot and the group
-- Arguments: 1  its name  2  how many messages at most
-- Returns:   1 if it is gone, 0 if messages are left: call it again. NOGROUP where the group was not declared.
-- Invariant: behind its start, which moves on with each part, everything is as before; of what lies before that, the
--            counts of acknowledgements are those of the other groups, and what all of these acknowledged is removed.
--            What no other group needs stays for the groups to come.

local position = redis.call('HGET', config, 'position')
if not position then
    return redis.error_reply('NOGROUP there is no such group')
end
local named, starts, start = redis.call('HGETALL', meta), {}, 0
for at = 1, #named, 2 do
    if named[at] == 'group:' .. ARGV[1] then
        start = named[at + 1]
    elseif named[at]:sub(1, 6) == 'group:' then
        starts[#starts + 1] = tonumber(named[at + 1])
    end
end

local function drop(id, offset)
    local is_acked = offset <= tonumber(position) and redis.call('HEXISTS', state, id) == 0
    local needed, acked = 0, tonumber(redis.call('HGET', acks, id) or 0) - (is_acked and 1 or 0)
    for _, key in ipairs({retry, prepare, dead}) do redis.call('ZREM', key, id) end
    redis.call('HDEL', state, id)
    for _, other in ipairs(starts) do
        if other < offset then needed = needed + 1 end
    end
    if acked > 0 and acked < needed then
        redis.call('HSET', acks, id, acked)
    else
        redis.call('HDEL', acks, id)
    end
    if acked > 0 and acked >= needed then
        redis.call('ZREM', log, id)
        redis.call('HDEL', body, id)
        redis.call('ZADD', ids, now_us, id)
    end
end

local part = redis.call('ZRANGE', log, '(' .. start, '+inf', 'BYSCORE', 'LIMIT', 0, ARGV[2], 'WITHSCORES')
for at = 1, #part, 2 do
    drop(part[at], tonumber(part[at + 1]))
end
if #part == 2 * ARGV[2] then
    local last = part[#part]
    redis.call('HSET', meta, 'group:' .. ARGV[1], last)
    redis.call('HSET', config, 'position', tonumber(last) > tonumber(position) and last or position)
    return 0
end
redis.call('HDEL', meta, 'group:' .. ARGV[1])
redis.call('UNLINK', config, retry, prepare, dead, state)
return 1
