#!lua flags=allow-oom
-- Stops or resumes the deliveries of a group.
--
-- Keys:      those of the slot and the group
-- Arguments: 1  1 to stop, 0 to resume
-- Returns:   1. NOGROUP where the group was not declared.
-- Invariant: deliveries that were made stay as they are.

if redis.call('EXISTS', config) == 0 then
    return redis.error_reply('NOGROUP there is no such group')
end
redis.call('HSET', config, 'paused', ARGV[1])
return 1
