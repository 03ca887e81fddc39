"""The delay cluster: which node owns which shard, how a node hosts its shards, and where a request goes."""
