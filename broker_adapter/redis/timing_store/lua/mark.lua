#!lua flags=allow-oom
-- Sets the generation of a slot.
--
-- Keys:      1  generation
-- Arguments: 1  the one that it must have (empty: none)  2  the new one  3  for how many ms (0: for ever)
-- Returns:   1 if it was set, else 0
-- Invariant: a slot has one rebuild at a time, until that lets its time pass; one during which the slot was emptied does
--            not become complete.

if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then
    return 0
end
if ARGV[3] == '0' then
    redis.call('SET', KEYS[1], ARGV[2])
else
    redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
end
return 1
