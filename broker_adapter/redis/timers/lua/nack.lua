#!lua flags=allow-oom
-- Gives deliveries back: to retry, or to dead where their attempts are used up.
--
-- Keys:      those of the slot and the group
-- Arguments: 1  ms until they are visible; empty: the group's backoff, or none where the attempt does not count  2  the reason  3  1 if the attempt counts, else 0
--            then for each receipt its epoch and id
-- Returns:   for each in order 1 (in retry), 2 (dead) or 3 (stale)
-- Invariant: what was given back has no valid receipt until it is delivered again.

local function backoff_ms(attempts)
    local initial, multiplier, most = unpack(
        redis.call('HMGET', config, 'backoff_initial_ms', 'backoff_multiplier', 'backoff_max_ms'))
    return math.min(tonumber(most), initial * multiplier ^ (attempts - 1))
end

local function nack(epoch, id)
    local found = delivery_of(id, epoch)
    if not found then return 3 end
    found[1] = 0
    local delay_ms = tonumber(ARGV[1]) or (ARGV[3] == '1' and backoff_ms(found[2]) or 0)
    local visible_us = now_us + math.floor(delay_ms * 1000)
    if ARGV[3] == '1' then
        found[6] = 0 -- tried; given back untried it is suspected as before
        return fail(id, found, ARGV[2], visible_us) and 2 or 1
    end
    found[2] = found[2] - 1
    redis.call('ZREM', prepare, id)
    redis.call('ZADD', retry, visible_us, id)
    set_state(id, found)
    return 1
end

local results = {}
for at = 4, #ARGV, 2 do
    results[#results + 1] = nack(ARGV[at], ARGV[at + 1])
end
return results
