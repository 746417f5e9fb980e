"""What `gateway.py` measures with: the gateway's process, a fake upstream server, a load generator."""
