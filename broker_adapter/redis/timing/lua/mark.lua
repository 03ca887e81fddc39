#!lua flags=allow-oom
-- Sets the generation of a slot.
--
-- Keys:      1  generation
-- Arguments: 1  the one that it must have (empty: any)  2  the new one
-- Returns:   1 if it was set, else 0
-- Invariant: a rebuild during which the slot was emptied, or another rebuild began, does not become complete.

if ARGV[1] ~= '' and redis.call('GET', KEYS[1]) ~= ARGV[1] then
    return 0
end
redis.call('SET', KEYS[1], ARGV[2])
return 1
