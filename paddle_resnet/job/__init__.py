"""The processes of a job."""
