#!lua flags=allow-oom
-- Sets the generation of a slot.
--
-- Keys:      1  generation
-- Arguments: 1  the one that it must have (empty: none), unless it has the new one  2  the new one (empty: none)
--            3  for how many ms (0: for ever)
-- Returns:   1 if it has the new one, else 0
-- Invariant: a slot has one rebuild at a time, until that lets its time pass; one during which the slot was emptied does
--            not become complete.

local generation = redis.call('GET', KEYS[1]) or ''
if generation ~= ARGV[1] and generation ~= ARGV[2] then
    return 0
end
if ARGV[2] == '' then
    redis.call('DEL', KEYS[1])
elseif ARGV[3] == '0' then
    redis.call('SET', KEYS[1], ARGV[2])
else
    redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
end
return 1
