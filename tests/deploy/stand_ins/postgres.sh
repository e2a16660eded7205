#!/bin/sh
# Start PostgreSQL as the entrypoint of its official image does, with Debian's programs: make the cluster at the first
# start, from the same variables.
set -eu
data=/var/lib/postgresql/data
PATH=$(echo /usr/lib/postgresql/*/bin):$PATH
if [ ! -s "$data/PG_VERSION" ]; then
  # shellcheck disable=SC2086 # several arguments
  initdb --pgdata="$data" --username="$POSTGRES_USER" --pwfile="$POSTGRES_PASSWORD_FILE" --encoding=UTF8 \
    --locale=C.UTF-8 --auth-local=trust $POSTGRES_INITDB_ARGS
  echo "host all all all scram-sha-256" >> "$data/pg_hba.conf"
  echo "CREATE DATABASE $POSTGRES_DB;" | postgres --single -D "$data" postgres
fi
exec postgres -D "$data" -c "listen_addresses=*"
