#!lua flags=allow-oom
-- Registers a topic.
--
-- Keys:      1  the hash of all topics
-- Arguments: 1  the topic  2  its number of slots, if it is new
-- Returns:   its number of slots
-- Invariant: the number of slots of a topic never changes. It writes always, so that a WAIT behind it waits for a
--            registration that it repeats, too; and on a full server, so that what is there can be consumed.

local slots = redis.call('HGET', KEYS[1], ARGV[1]) or ARGV[2]
redis.call('HSET', KEYS[1], ARGV[1], slots)
return tonumber(slots)
