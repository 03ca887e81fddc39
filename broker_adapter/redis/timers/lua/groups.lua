#!lua flags=no-writes
-- Lists the consumer groups.
--
-- Keys:      those of the slot
-- Arguments: none
-- Returns:   their names
-- Invariant: changes nothing.

local names = {}
for _, name in ipairs(redis.call('HKEYS', meta)) do
    if name:sub(1, 6) == 'group:' then
        names[#names + 1] = name:sub(7)
    end
end
return names
