"""Benchmarks of the broker, alone and compared with Redis Streams, NATS JetStream and RabbitMQ. Not shipped."""
