#!lua flags=allow-oom
-- Moves dead letters to retry, their attempts and history begun anew.
--
-- Keys:      those of the slot and the group
-- Arguments: 1  how many at most  2  how many are visible each second (0: all at once)  3  how many were redriven before
--            then the ids; none: the oldest
-- Returns:   how many. NOGROUP where the group was not declared.
-- Invariant: an id that is not dead is not moved; no receipt of an earlier delivery is valid.

if redis.call('EXISTS', config) == 0 then
    return redis.error_reply('NOGROUP there is no such group')
end
local named = {unpack(ARGV, 4)}
if #named == 0 then
    named = redis.call('ZRANGE', dead, 0, ARGV[1] - 1)
end
local per_second, before, redriven = tonumber(ARGV[2]), tonumber(ARGV[3]), 0
for _, id in ipairs(named) do
    if redis.call('ZREM', dead, id) == 1 then
        local second = per_second > 0 and math.floor((before + redriven) / per_second) or 0
        redriven = redriven + 1
        set_state(id, {0, 0, {}})
        redis.call('ZADD', retry, now_us + second * 1000000 + redriven, id)
    end
end
return redriven
