#!lua flags=no-writes
-- Lists rows of a slot, a part at a time, in no order.
--
-- Keys:      1  due
-- Arguments: 1  the cursor: `0` for the first part, then that of the answer before  2  about how many rows
-- Returns:   the cursor of the next part (`0`: this was the last), then for each row its name and its time
-- Invariant: changes nothing. A row that is there all the time is listed at least once, on one server.

local part = redis.call('ZSCAN', KEYS[1], ARGV[1], 'COUNT', ARGV[2])
local answer = {part[1]}
for at = 1, #part[2], 2 do
    answer[at + 1] = part[2][at]
    answer[at + 2] = string.format('%.0f', part[2][at + 1])
end
return answer
