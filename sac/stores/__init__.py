"""Where the inputs of regions wait for backward: on the device, scattered, on the host, in a contiguous buffer."""
