#!lua flags=allow-oom
-- Makes a consumer group, or changes its settings.
--
-- Keys:      those of the slot and the group
-- Arguments: 1  its name  2  where it begins: an offset, or `latest`
--            3  1 to change the settings of a group that is there, 0 to leave them
--            then the names and values of its settings
-- Returns:   1 if it was made, 0 if it was there
-- Invariant: the position of a group that is there stays where it is.

local is_new = redis.call('EXISTS', config) == 0
if is_new then
    local start = ARGV[2] == 'latest' and (redis.call('HGET', meta, 'offset') or 0) or ARGV[2]
    redis.call('HSET', meta, 'group:' .. ARGV[1], start)
    redis.call('HSET', config, 'position', start)
end
if is_new or ARGV[3] == '1' then
    redis.call('HSET', config, unpack(ARGV, 4))
end
return is_new and 1 or 0
