"""The Fencepost server: owns all access to Postgres and leases tasks to workers over gRPC."""
