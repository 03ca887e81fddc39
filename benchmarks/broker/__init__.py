"""The broker measured beside Redis Streams, NATS JetStream and RabbitMQ, and by itself. Not part of the product."""
