"""What the kernel says about memory: processes it killed, pressure, swap."""
