#!lua
-- Appends messages to the stream of one topic, in order; leaves out those whose id was appended within the window.
--
-- Keys:      1  the stream
--            2  the ids that were appended lately: a sorted set by the time of it, in ms
-- Arguments: 1  the window in ms
--            then for each message its id, the number of arguments of XADD behind the key, and these
-- Returns:   for each message in order 1 (appended) or 0 (repeat). Where one fails, the error's text in its place, and
--            nothing for those behind it, which were not tried.
-- Invariant: an id has a score within the window if and only if its entry was appended within the window. Each call
--            that appended or found a repeat also writes PEXPIRE, so that a WAIT behind it waits for the entry of a
--            repeat, too. At most twice as many ids are trimmed as messages are given, and 100.

local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local since_ms = now_ms - tonumber(ARGV[1])

local function is_new(id)
    if redis.call('ZADD', KEYS[2], 'NX', now_ms, id) == 1 then
        return true
    end
    if tonumber(redis.call('ZSCORE', KEYS[2], id)) > since_ms then
        return false
    end
    redis.call('ZADD', KEYS[2], now_ms, id)
    return true
end

-- The error's text where XADD was refused, else nil.
local function append(first, last)
    local entry = redis.pcall('XADD', KEYS[1], unpack(ARGV, first, last))
    if type(entry) == 'table' then
        return entry.err
    end
    return not entry and 'NOSTREAM there is no such stream' or nil
end

local results, at = {}, 2
while at < #ARGV do
    local id, first, last = ARGV[at], at + 2, at + 1 + tonumber(ARGV[at + 1])
    if is_new(id) then
        local refused = append(first, last)
        if refused then
            redis.call('ZREM', KEYS[2], id)
            results[#results + 1] = refused
            break
        end
        results[#results + 1] = 1
    else
        results[#results + 1] = 0
    end
    at = last + 1
end

local expired = redis.call('ZCOUNT', KEYS[2], '-inf', since_ms)
if expired > 0 then
    redis.call('ZREMRANGEBYRANK', KEYS[2], 0, math.min(expired, 2 * #results + 100) - 1)
end
redis.call('PEXPIRE', KEYS[2], ARGV[1])
return results
