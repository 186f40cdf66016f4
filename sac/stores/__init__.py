"""Input stores, which hold region inputs until backward: on the device, scattered, on the host, in one buffer."""
