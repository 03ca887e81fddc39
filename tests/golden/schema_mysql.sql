CREATE TABLE `archive` (
  `sent_at_us` bigint NOT NULL,
  `id` varchar(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  `kind` varchar(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  `topic` varchar(255) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  `message_key` varchar(1024) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin DEFAULT NULL,
  `body_sha256` varchar(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  `deliver_at_ms` bigint DEFAULT NULL,
  `created_at_us` bigint NOT NULL,
  `attempts` int NOT NULL,
  `outcome` varchar(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  PRIMARY KEY (`sent_at_us`,`id`),
  KEY `ix_archive_id` (`id`),
  KEY `ix_archive_created` (`created_at_us`)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin;

CREATE TABLE `compensator_instance` (
  `id` varchar(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  `zone` varchar(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  `started_at_us` bigint NOT NULL,
  `alive_until_us` bigint NOT NULL,
  PRIMARY KEY (`id`)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin;

CREATE TABLE `compensator_lease` (
  `source` varchar(255) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  `instance` varchar(64) CHARACTER SET ascii COLLATE ascii_bin DEFAULT NULL,
  `until_us` bigint NOT NULL,
  `epoch` bigint NOT NULL,
  PRIMARY KEY (`source`)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin;

CREATE TABLE `inbox` (
  `consumer_group` varchar(255) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  `message_id` varchar(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  `topic` varchar(255) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  `handled_at_us` bigint NOT NULL,
  PRIMARY KEY (`consumer_group`,`topic`,`message_id`),
  KEY `ix_inbox_handled` (`handled_at_us`)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin;

CREATE TABLE `message` (
  `id` varchar(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  `kind` varchar(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  `state` varchar(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  `due_at_us` bigint NOT NULL,
  `token` varchar(32) CHARACTER SET ascii COLLATE ascii_bin DEFAULT NULL,
  `attempts` int NOT NULL,
  `topic` varchar(255) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  `message_key` varchar(1024) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin DEFAULT NULL,
  `headers` mediumtext CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
  `body` longblob NOT NULL,
  `body_sha256` varchar(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  `deliver_at_ms` bigint DEFAULT NULL,
  `created_at_us` bigint NOT NULL,
  `last_error` mediumtext CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
  `order_key` varchar(32) CHARACTER SET ascii COLLATE ascii_bin DEFAULT NULL,
  `order_seq` bigint DEFAULT NULL,
  PRIMARY KEY (`id`),
  KEY `ix_message_state_due` (`state`,`due_at_us`,`id`)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin;

CREATE TABLE `order_head` (
  `order_key` varchar(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  `seq` bigint NOT NULL,
  PRIMARY KEY (`order_key`)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin;

CREATE TABLE `order_queue` (
  `order_key` varchar(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  `order_seq` bigint NOT NULL,
  `message_id` varchar(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  PRIMARY KEY (`order_key`,`order_seq`)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin;

CREATE TABLE `outbox_alembic_version` (
  `version_num` varchar(32) NOT NULL,
  PRIMARY KEY (`version_num`)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_0900_ai_ci
