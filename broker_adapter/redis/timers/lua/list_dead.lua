#!lua flags=no-writes
-- Reads one page of a group's dead letters, oldest first.
--
-- Keys:      those of the slot and the group
-- Arguments: 1  how many at most  2  the id behind which to begin (empty, or not dead any more: at the oldest)
--            3  bytes of bodies behind which no further one is read
-- Returns:   1 if the bytes ended the page, else 0; then for each its id, time of death in ms, state and body. NOGROUP
--            where the group was not declared.
-- Invariant: changes nothing.

if redis.call('EXISTS', config) == 0 then
    return redis.error_reply('NOGROUP there is no such group')
end
local rank = redis.call('ZRANK', dead, ARGV[2])
local first = rank and rank + 1 or 0
local answer, bytes = {0}, 0
local page = redis.call('ZRANGE', dead, first, first + ARGV[1] - 1, 'WITHSCORES')
for at = 1, #page, 2 do
    if bytes >= tonumber(ARGV[3]) then
        answer[1] = 1
        break
    end
    local message = redis.call('HGET', body, page[at])
    bytes = bytes + #message
    answer[#answer + 1] = page[at]
    answer[#answer + 1] = math.floor(page[at + 1] / 1000)
    answer[#answer + 1] = redis.call('HGET', state, page[at])
    answer[#answer + 1] = message
end
return answer
