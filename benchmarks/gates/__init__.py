"""What gates and the automatic rollback do with bad and good versions, by drawn rewards on a real store."""
