"""The processes of a job: how they are started, find each other and agree."""
