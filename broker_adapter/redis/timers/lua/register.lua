#!lua
-- Registers a topic.
--
-- Keys:      1  the hash of all topics
-- Arguments: 1  the topic  2  its number of slots, if it is new
-- Returns:   its number of slots
-- Invariant: the number of slots of a topic never changes.

redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[2])
return tonumber(redis.call('HGET', KEYS[1], ARGV[1]))
