"""The only translation between protobuf messages and domain types, one file per proto file."""
