{{/* The configuration file of a role: the values' settings, the role's own over them, and the chart's addresses over both. */}}
{{- define "kvferry.config" -}}
{{- $root := .root -}}
{{- $ports := $root.Values.ports -}}
{{- $role := index $root.Values .role -}}
{{- $any := ternary "[::]" "0.0.0.0" (eq $root.Values.network.ipFamily "IPv6") -}}
{{- $routers := printf "tcp://%s-router-workers.%s.svc.%s:%v" (include "kvferry.fullname" $root) $root.Release.Namespace $root.Values.network.clusterDomain $ports.workers -}}
{{- $config := mergeOverwrite (deepCopy (default dict $root.Values.config)) (deepCopy (default dict $role.config)) -}}
{{- include "kvferry.readSizes" (dict "section" $config "path" "" "role" .role) -}}
{{- $chart := dict
      "model" (dict "cache_dir" "/var/cache/kvferry" "name" (dig "model" "name" "smollm2-135m" $config))
      "connector" dict
      "router" (dict
        "host" (trimPrefix "[" $any | trimSuffix "]")
        "port" $ports.http
        "ops_host" (trimPrefix "[" $any | trimSuffix "]")
        "ops_port" $ports.ops
        "worker_address" (printf "tcp://%s:%v" $any $ports.workers))
      "worker" (dict
        "router_addresses" (list $routers)
        "control_address" (printf "tcp://%s:%v" $any $ports.control)
        "data_port" $ports.data
        "ops_host" (trimPrefix "[" $any | trimSuffix "]")
        "ops_port" $ports.ops
        "is_supervised" true)
      "security" (dict "insecure" $root.Values.security.insecure) -}}
{{- $config = mergeOverwrite $config $chart -}}
{{- if and (eq .role "router") $root.Values.security.tls.existingSecret -}}
{{- $config = mergeOverwrite $config (dict "router" (dict "tls_cert" "/etc/kvferry-tls/tls.crt" "tls_key" "/etc/kvferry-tls/tls.key")) -}}
{{- end -}}
{{- if and (eq .role "router") $root.Values.security.apiKeys.existingSecret -}}
{{- $config = mergeOverwrite $config (dict "router" (dict "requires_api_key" true)) -}}
{{- end -}}
{{- $loopback := ternary "[::1]" "127.0.0.1" (eq $root.Values.network.ipFamily "IPv6") -}}
{{- $isSidecar := eq $root.Values.kvstore.mode "sidecar" -}}
{{- if eq .role "kvstore" -}}
{{- $store := dict
      "bind_address" (printf "tcp://%s:%v" (ternary $loopback $any $isSidecar) $ports.store)
      "ops_host" (trimPrefix "[" $any | trimSuffix "]")
      "ops_port" (ternary $ports.storeOps $ports.ops $isSidecar)
      "disk_path" (ternary "/var/lib/kvferry" "" (ne $role.disk.size "")) -}}
{{- if and $role.disk.size (not (dig "kvstore" "disk_bytes" 0 $config)) -}}
{{- $_ := set $store "disk_bytes" (mulf 0.9 (include "kvferry.bytes" $role.disk.size | float64) | floor | int64) -}}
{{- end -}}
{{- with $root.Values.kvstore.redis -}}
{{- if .enabled -}}{{- $_ := set $store "redis_url" (printf "redis://%s:%v/0" .host .port) -}}{{- end -}}
{{- end -}}
{{- $config = mergeOverwrite $config (dict "kvstore" $store) -}}
{{- else if and $root.Values.kvstore.enabled (has .role (include "kvferry.workers" $root | fromJsonArray)) -}}
{{- $service := printf "%s-kvstore.%s.svc.%s" (include "kvferry.fullname" $root) $root.Release.Namespace $root.Values.network.clusterDomain -}}
{{- $address := printf "tcp://%s:%v" (ternary $loopback $service $isSidecar) $ports.store -}}
{{- $config = mergeOverwrite $config (dict "kvstore" (dict "address" $address)) -}}
{{- end -}}
{{- if and (ne $root.Values.lmcache.mode "none") (has .role (list "prefill" "decode" "aggregated")) -}}
{{- $host := ternary "127.0.0.1" $root.Values.lmcache.host (eq $root.Values.lmcache.mode "sidecar") -}}
{{- $lmcache := dict
      "server_address" (printf "tcp://%s:%v" $host $root.Values.lmcache.port)
      "http_address" (printf "http://%s:%v" $host $root.Values.lmcache.httpPort) -}}
{{- $config = mergeOverwrite $config (dict "connector" (dict "lmcache" $lmcache)) -}}
{{- end -}}
{{- if and $root.Values.encode.enabled (has .role (include "kvferry.workers" $root | fromJsonArray)) -}}
{{- $_ := set $config "ec_connector" (merge (default dict $config.ec_connector) (dict "name" "p2p" "transports" (list "tcp"))) -}}
{{- end -}}
{{- $resources := default dict $role.resources -}}
{{- $cpu := dig "limits" "cpu" (dig "requests" "cpu" "" $resources) $resources | toString -}}
{{- $computes := has .role (list "encode" "prefill" "decode" "aggregated") -}}
{{- if and $computes (regexMatch "^[0-9]+([.][0-9]+)?m?$" $cpu) (not (hasKey $config.worker "cpu_threads")) -}}
{{- $cores := divf (trimSuffix "m" $cpu | float64) (ternary 1000.0 1.0 (hasSuffix "m" $cpu)) -}}
{{- $_ := set $config.worker "cpu_threads" (max 1 (floor $cores | int)) -}}
{{- end -}}
{{- toYaml $config -}}
{{- end -}}

{{/*
Put numbers in the place of sizes such as 1GiB, which templates compare. The bounds of the schema are for numbers only, so those
of sizes are here: at least 1 byte, or 0 tokens, and less than 10^18, where nothing else is said.
*/}}
{{- define "kvferry.readSizes" -}}
{{- $lowest := dict "kvstore.block_bytes" 0 "router.max_head_bytes" 1024 -}}
{{- $highest := dict "router.max_head_bytes" 1048576 "router.images.max_bytes" 20971520 "router.images.max_total_bytes" 41943040 -}}
{{- range $name, $value := .section -}}
{{- $path := trimPrefix "." (printf "%s.%s" $.path $name) -}}
{{- if and (kindIs "map" $value) (ne $name "extra") -}}
{{- include "kvferry.readSizes" (dict "section" $value "path" $path "role" $.role) -}}
{{- else if and (kindIs "string" $value) (regexMatch "(_bytes|_tokens|max_model_len)$" $name) -}}
{{- $size := include "kvferry.exactBytes" ($value | replace " " "" | trimSuffix "B") -}}
{{- $low := dig $path (ternary 1 0 (hasSuffix "_bytes" $name)) $lowest | int64 -}}
{{- $high := dig $path 999999999999999999 $highest | int64 -}}
{{- if or (not (regexMatch "^[0-9]{1,18}$" $size)) (lt (int64 $size) $low) (gt (int64 $size) $high) -}}
{{- fail (printf "%s.config.%s = %s: expected a whole number, at least %d and at most %d" $.role $path $value $low $high) -}}
{{- end -}}
{{- $_ := set $.section $name (int64 $size) -}}
{{- end -}}
{{- end -}}
{{- end -}}
