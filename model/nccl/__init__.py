"""What NCCL itself would choose: topology search, tuning tables, algorithm, protocol, channels."""
