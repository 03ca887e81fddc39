#!lua flags=allow-oom
-- Removes a slot, and the group whose keys are given beside those of the slot.
--
-- Keys:      those of the slot, and perhaps of a group
-- Arguments: none
-- Returns:   how many keys were there
-- Invariant: repeating it does nothing.

return redis.call('UNLINK', unpack(KEYS))
