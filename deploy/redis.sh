#!/bin/sh
# Start Redis with the password of /run/secrets/redis_password. The configuration has its hash, not the password, and
# lies in memory; arguments are avoided, because every process of the machine may list them.
set -eu
umask 077
hash=$(printf %s "$(cat /run/secrets/redis_password)" | sha256sum | cut -d ' ' -f 1)
# No data is stored: ids of jobs are sent again from the database. A full Redis refuses ids rather than drop some.
cat > /run/redis/redis.conf <<END
bind * -::*
port 6379
dir /run/redis
user default on #$hash ~* &* +@all
save ""
appendonly no
maxmemory 256mb
maxmemory-policy noeviction
END
exec redis-server /run/redis/redis.conf
