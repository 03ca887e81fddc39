#!lua
-- Appends messages to the stream of one topic, in order; leaves out those whose id was appended within the window.
--
-- Keys:      1  the stream
--            2  the ids that were appended lately: a sorted set by the time of it, in ms
-- Arguments: 1  the window in ms
--            2  the length that XADD trims the stream to, about; 0: it does not
--            then for each message its id, the number of arguments of XADD behind the key, and these
-- Returns:   for each message in order 1 (appended) or 0 (repeat). Where one fails, the error's text in its place, and
--            nothing for those behind it, which were not tried. Then, where entries were trimmed, a list: how many,
--            and for each group that had not read or acknowledged all of them its name, and how many of either.
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

-- The stream's length and first entry, and of each group its name, last entry and how many it has not read (nil: unknown).
-- Nil where the user may not ask, or the key is no stream.
local function state_of_stream()
    local length, first = redis.pcall('XLEN', KEYS[1]), redis.pcall('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)
    local told = redis.pcall('XINFO', 'GROUPS', KEYS[1])
    if type(length) ~= 'number' or first.err then return nil end
    local groups = {}
    for _, group in ipairs(told.err and {} or told) do -- an error where there is no stream yet, too
        local fields = {}
        for place = 1, #group, 2 do fields[group[place]] = group[place + 1] end
        groups[#groups + 1] = {fields.name, fields['last-delivered-id'], fields.lag or nil}
    end
    return {length = length, first = first[1] and first[1][1] or '0-0', groups = groups}
end

local function is_before(one, other)
    local ms, sequence = one:match('(%d+)-(%d+)')
    local other_ms, other_sequence = other:match('(%d+)-(%d+)')
    if ms ~= other_ms then return tonumber(ms) < tonumber(other_ms) end
    return tonumber(sequence) < tonumber(other_sequence)
end

-- How many entries were trimmed while these were added, then of each group that misses some its name, how many it had
-- not read, and not acknowledged. Nil where none were.
local function trimmed_since(before, added)
    local after = before and state_of_stream()
    local trimmed = after and before.length + added - after.length or 0
    if trimmed <= 0 then return nil end
    local answer = {trimmed}
    for _, group in ipairs(before.groups) do
        local name, last, lag = unpack(group, 1, 3)
        local unread, pending = 0, {}
        if is_before(last, after.first) then
            unread = math.min(trimmed, (lag or before.length) + added - after.length)
        end
        if not is_before(last, before.first) then
            pending = redis.pcall('XPENDING', KEYS[1], name, before.first, '(' .. after.first, trimmed)
        end
        if unread > 0 or #pending > 0 then
            for _, told in ipairs({name, unread, #pending}) do answer[#answer + 1] = told end
        end
    end
    return answer
end

local maxlen, added = tonumber(ARGV[2]), 0
local before = maxlen > 0 and state_of_stream() or nil
local results, at = {}, 3
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
        added = added + 1
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
if type(results[#results]) == 'number' then results[#results + 1] = trimmed_since(before, added) end
return results
