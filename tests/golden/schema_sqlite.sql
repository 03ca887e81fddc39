CREATE TABLE outbox_alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT outbox_alembic_version_pkc PRIMARY KEY (version_num)
);

CREATE TABLE outbox_archive (
	sent_at_us BIGINT NOT NULL, 
	id VARCHAR(64) NOT NULL, 
	kind VARCHAR(32) NOT NULL, 
	topic VARCHAR(255) NOT NULL, 
	message_key VARCHAR(1024), 
	body_sha256 VARCHAR(64) NOT NULL, 
	deliver_at_ms BIGINT, 
	created_at_us BIGINT NOT NULL, 
	attempts INTEGER NOT NULL, 
	outcome VARCHAR(32) NOT NULL, 
	PRIMARY KEY (sent_at_us, id)
);

CREATE TABLE outbox_compensator_instance (
	id VARCHAR(64) NOT NULL, 
	zone VARCHAR(64) NOT NULL, 
	started_at_us BIGINT NOT NULL, 
	alive_until_us BIGINT NOT NULL, 
	PRIMARY KEY (id)
);

CREATE TABLE outbox_compensator_lease (
	source VARCHAR(255) NOT NULL, 
	instance VARCHAR(64), 
	until_us BIGINT NOT NULL, 
	epoch BIGINT NOT NULL, 
	PRIMARY KEY (source)
);

CREATE TABLE "outbox_inbox" (
	consumer_group VARCHAR(255) NOT NULL, 
	topic VARCHAR(255) NOT NULL, 
	message_id VARCHAR(64) NOT NULL, 
	handled_at_us BIGINT NOT NULL, 
	PRIMARY KEY (consumer_group, topic, message_id)
);

CREATE TABLE outbox_message (
	id VARCHAR(64) NOT NULL, 
	kind VARCHAR(32) NOT NULL, 
	state VARCHAR(32) NOT NULL, 
	due_at_us BIGINT NOT NULL, 
	token VARCHAR(32), 
	attempts INTEGER NOT NULL, 
	topic VARCHAR(255) NOT NULL, 
	message_key VARCHAR(1024), 
	headers TEXT, 
	"body" BLOB NOT NULL, 
	body_sha256 VARCHAR(64) NOT NULL, 
	deliver_at_ms BIGINT, 
	created_at_us BIGINT NOT NULL, 
	last_error TEXT, order_key VARCHAR(32), order_seq BIGINT, 
	PRIMARY KEY (id)
);

CREATE TABLE outbox_order_head (
	order_key VARCHAR(32) NOT NULL, 
	seq BIGINT NOT NULL, 
	PRIMARY KEY (order_key)
);

CREATE TABLE outbox_order_queue (
	order_key VARCHAR(32) NOT NULL, 
	order_seq BIGINT NOT NULL, 
	message_id VARCHAR(64) NOT NULL, 
	PRIMARY KEY (order_key, order_seq)
);

CREATE INDEX ix_outbox_archive_created ON outbox_archive (created_at_us);

CREATE INDEX ix_outbox_archive_id ON outbox_archive (id);

CREATE INDEX ix_outbox_inbox_handled ON outbox_inbox (handled_at_us);

CREATE INDEX ix_outbox_message_state_due ON outbox_message (state, due_at_us, id)
