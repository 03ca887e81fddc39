#!lua flags=allow-oom
-- Acknowledges deliveries; removes messages that no other group needs.
--
-- Keys:      those of the slot and the group
-- Arguments: for each receipt its epoch and id
-- Returns:   for each in order 1 (acknowledged), 2 (was acknowledged before), 3 (stale) or 0 (unknown)
-- Invariant: a receipt counts while no later delivery of its message was made, also behind its deadline; one that was
--            given back, is dead or was redriven does not count.

local position = redis.call('HGET', config, 'position')
if not position then
    local unknown = {}
    for at = 1, #ARGV, 2 do unknown[#unknown + 1] = 0 end
    return unknown
end
local starts = {}
local named = redis.call('HGETALL', meta)
for at = 1, #named, 2 do
    if named[at]:sub(1, 6) == 'group:' then
        starts[#starts + 1] = tonumber(named[at + 1])
    end
end

local function groups_that_need(offset)
    local needed = 0
    for _, start in ipairs(starts) do
        if start < offset then needed = needed + 1 end
    end
    return needed
end

local function settle(id)
    redis.call('HDEL', state, id)
    local needed = groups_that_need(tonumber(redis.call('ZSCORE', log, id)))
    if needed > 1 and redis.call('HINCRBY', acks, id, 1) < needed then
        return
    end
    redis.call('ZREM', log, id)
    redis.call('HDEL', body, id)
    redis.call('ZADD', ids, now_us, id) -- a repeat is told by its body until here, and from here on by its id
    if needed > 1 then redis.call('HDEL', acks, id) end
end

local function ack(epoch, id)
    local found = state_of(id)
    if found then
        local is_newest = found[1] == tonumber(epoch)
        if is_newest and redis.call('ZREM', prepare, id) + redis.call('ZREM', retry, id) == 1 then
            settle(id)
            return 1
        end
        return 3
    end
    local offset = redis.call('ZSCORE', log, id)
    if offset then
        return tonumber(offset) <= tonumber(position) and 2 or 3
    end
    return redis.call('ZSCORE', ids, id) and 2 or 0
end

local results = {}
for at = 1, #ARGV, 2 do
    results[#results + 1] = ack(ARGV[at], ARGV[at + 1])
end
return results
