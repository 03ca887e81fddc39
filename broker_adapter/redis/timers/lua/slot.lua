-- What every script of a slot begins with: its keys, the time, and moves that several scripts share. The loader puts
-- this text behind the first line of each. The model is drawn in decision 96.
--
-- Keys:  1  meta: a hash: `offset`, the newest in the log; `logged`, how many came to it; `group:<name>`, the offset
--           behind which the group began
--        2  store: a sorted set, id by due time     3  log: a sorted set, id by offset
--        4  body: a hash, id to message             5  ids: a sorted set, id by the time it was added
--        6  canceled: a sorted set, id by time      7  acks: a hash, id to the number of groups that acknowledged it
--        of one consumer group, where the script is about one:
--        8  config: a hash                          9  retry: a sorted set, id by the time it is visible
--       10  prepare: a sorted set, id by deadline  11  dead: a sorted set, id by time of death
--       12  state: a hash, id to {epoch, attempts, {reason, times, ...}, how many were delivered together, 1 if a deadline
--           that passes counts as an attempt, how many were in the delivery whose deadline passed last (1 where that was
--           an attempt; 0: none passed, or it was tried since)}; epoch 0: no receipt is valid
-- Times and offsets are microseconds since the Unix epoch, by this server's clock; add and dispatch_due use the caller's, if it is
-- behind. An offset is the time a message came to the log, or one more than the offset before it, whichever is later.
-- Errors of all scripts: WRONGTYPE where a key holds something else; nothing was done.
-- Invariant of all scripts: an id that has a body is, for each group that began before it, in exactly one place: store,
-- log behind the group's position, retry, prepare, dead, or acknowledged (in the log before the position and in no set
-- of the group). It leaves the log and loses its body once each such group has acknowledged it.

local meta, store, log, body, ids, canceled, acks, config, retry, prepare, dead, state = unpack(KEYS)
-- A script that fails in the middle is not undone: a key that holds something else must be found before any write.
local hashes = {[1] = true, [4] = true, [7] = true, [8] = true, [12] = true}
for at, key in ipairs(KEYS) do
    if hashes[at] then
        redis.call('HEXISTS', key, '')
    else
        redis.call('ZCARD', key)
    end
end

local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]

-- Milliseconds until the smallest score of a sorted set, rounded up; -1 where it is empty.
local function ms_until_first(key)
    local first = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')
    return first[2] and math.max(0, math.ceil((first[2] - now_us) / 1000)) or -1
end

-- Lets nothing be due that is not due by the caller's clock, too, so that a server whose clock is ahead is not early. By not
-- a second more: with that tolerance messages were early by it. A caller that is behind is late, the lesser evil.
local function bound_now(latest_ms)
    now_us = math.min(now_us, latest_ms * 1000)
end

local function due(key, limit)
    return redis.call('ZRANGE', key, '-inf', now_us, 'BYSCORE', 'LIMIT', 0, limit)
end

-- Adds ids to the log in this order.
local function log_in_order(due_ids)
    local offset = tonumber(redis.call('HGET', meta, 'offset') or 0)
    for _, id in ipairs(due_ids) do
        offset = math.max(offset + 1, now_us)
        redis.call('ZADD', log, offset, id)
    end
    redis.call('HSET', meta, 'offset', offset)
    redis.call('HINCRBY', meta, 'logged', #due_ids)
end

local function trim(key, window_us, most)
    local expired = redis.call('ZCOUNT', key, '-inf', now_us - window_us)
    if expired > 0 then
        redis.call('ZREMRANGEBYRANK', key, 0, math.min(expired, most) - 1)
    end
end

local function state_of(id)
    local packed = redis.call('HGET', state, id)
    return packed and cmsgpack.unpack(packed)
end

local function set_state(id, found)
    redis.call('HSET', state, id, cmsgpack.pack(found))
end

-- The state of a delivery that has this epoch and is in prepare; else nil: the receipt is stale.
local function delivery_of(id, epoch)
    local found = state_of(id)
    return found and found[1] == tonumber(epoch) and redis.call('ZSCORE', prepare, id) and found or nil
end

local deaths = 0

-- Ends a failed attempt: from prepare to retry, or to dead where the attempts are used up, which it returns. A history
-- keeps its newest 8 entries; those that die in one call keep its order.
local function fail(id, found, reason, visible_us)
    local history = found[3]
    if history[#history - 1] == reason then
        history[#history] = history[#history] + 1
    else
        history[#history + 1] = reason
        history[#history + 1] = 1
    end
    if #history > 16 then
        history = {unpack(history, 3)}
        found[3] = history
    end
    redis.call('ZREM', prepare, id)
    local is_dead = found[2] >= tonumber(redis.call('HGET', config, 'max_attempts'))
    if is_dead then
        found[1] = 0
        redis.call('ZADD', dead, now_us + deaths, id)
        deaths = deaths + 1
    else
        redis.call('ZADD', retry, visible_us, id)
    end
    set_state(id, found)
    return is_dead
end
