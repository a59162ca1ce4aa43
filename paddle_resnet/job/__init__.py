"""Start, connect and monitor the processes of a job."""
