{{/* Checks of roles against each other and against what a role's pods have. Included by _validate.tpl. */}}

{{/* Settings on which producers and consumers of KV must agree, else the router never pairs them. */}}
{{- define "kvferry.validateAgreement" -}}
{{- $first := "" -}}
{{- $common := dict -}}
{{- range $role := concat (include "kvferry.kvWorkers" . | fromJsonArray) (ternary (list "encode") list .Values.encode.enabled) (list "router") -}}
{{- $config := include "kvferry.config" (dict "root" $ "role" $role) | fromYaml -}}
{{- $found := dict "model.name" $config.model.name "model.served_name" (default $config.model.name $config.model.served_name) -}}
{{- if ne $role "router" -}}
{{- $_ := set $found "model.quantization" (dig "model" "quantization" "none" $config) -}}
{{- end -}}
{{- if has $role (list "prefill" "decode") -}}
{{- $_ := set $found "model.dtype" (dig "model" "dtype" "auto" $config) -}}
{{- $_ := set $found "connector.name" (dig "connector" "name" "p2p" $config) -}}
{{- $_ := set $found "connector.connectors" (dig "connector" "connectors" list $config | join ",") -}}
{{- end -}}
{{- if has $role (include "kvferry.kvWorkers" $ | fromJsonArray) -}}
{{- $_ := set $found "connector.peer_prefixes" (dig "connector" "peer_prefixes" false $config) -}}
{{- end -}}
{{- range $path, $value := $found -}}
{{- $other := get $common $path -}}
{{- if and $other (ne (toString $value) (toString $other.value)) -}}
{{- fail (printf "%s.config.%s = %q, but %s has %q: roles of one release must agree, so set config.%s; another model takes another release" $role $path (toString $value) $other.role (toString $other.value) $path) -}}
{{- end -}}
{{- $_ := set $common $path (dict "role" $role "value" $value) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The settings' own rules, which kvferry checks at its start. */}}
{{- define "kvferry.validateSettings" -}}
{{- $config := .config -}}
{{- $connector := $config.connector -}}
{{- $known := list "p2p" "lmcache" "multi" "offload" "store" -}}
{{- range $name := concat (list (default "p2p" $connector.name)) (default list $connector.connectors) -}}
{{- if not (or (has $name $known) (contains ":" $name)) -}}
{{- fail (printf "%s.config.connector.name or connectors: %q is no connector; take %s, or module:factory for one of your image" $.role $name (join ", " $known)) -}}
{{- end -}}
{{- end -}}
{{- if ne (eq (default "p2p" $connector.name) "multi") (not (empty $connector.connectors)) -}}
{{- fail (printf "%s.config.connector.connectors: the list is for connector.name = multi, which needs one such as [p2p, offload]" .role) -}}
{{- end -}}
{{- $names := include "kvferry.connectorNames" $connector | fromJsonArray -}}
{{- if has "p2p" $names -}}
{{- range $connector.transports -}}
{{- if not (has . (list "tcp" "nixl" "shm")) -}}
{{- fail (printf "%s.config.connector.transports: %q is no transport; take nixl or tcp" $.role .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- include "kvferry.validateEmbeddings" . -}}
{{- with dig "tracing" "endpoint" "" $config -}}
{{- include "kvferry.validatePort" (list $.role "tracing.endpoint" . (include "kvferry.portOf" .)) -}}
{{- end -}}
{{- range $host := ternary (dig "router" "images" "allowed_hosts" list $config) list (eq .role "router") -}}
{{- include "kvferry.validateImageHost" (list $.role (trim $host)) -}}
{{- end -}}
{{- if and $connector.peer_prefixes (not (has "p2p" $names)) -}}
{{- fail (printf "%s.config.connector.peer_prefixes: it is of connector p2p, which is not among %s; turn it off, or add p2p" .role (join ", " $names)) -}}
{{- end -}}
{{- if and (has "lmcache" $names) (eq .root.Values.lmcache.mode "none") -}}
{{- fail (printf "%s.config.connector: connector lmcache needs a server; set lmcache.mode to sidecar or external" .role) -}}
{{- end -}}
{{- include "kvferry.validateOrder" (list "config.connector.lease_renew_interval_s" (default 5.0 $connector.lease_renew_interval_s) "below" "config.connector.lease_s" (default 30.0 $connector.lease_s)) -}}
{{- include "kvferry.validateOrder" (list "config.connector.lease_s" (default 30.0 $connector.lease_s) "at most" "config.connector.lease_max_s" (default 600.0 $connector.lease_max_s)) -}}
{{- include "kvferry.validateOrder" (list "config.router.heartbeat_interval_s" (dig "router" "heartbeat_interval_s" 1.0 $config) "below" "config.router.heartbeat_timeout_s" (dig "router" "heartbeat_timeout_s" 5.0 $config)) -}}
{{- include "kvferry.validateOrder" (list "config.router.max_body_bytes" (dig "router" "max_body_bytes" 12582912 $config) "at most" "config.router.max_upload_bytes" (dig "router" "max_upload_bytes" 268435456 $config)) -}}
{{- include "kvferry.validateOrder" (list "config.kvstore.heartbeat_interval_s" (dig "kvstore" "heartbeat_interval_s" 0.5 $config) "below" "config.kvstore.client_timeout_s" (dig "kvstore" "client_timeout_s" 5.0 $config)) -}}
{{- end -}}

{{/* A port that Kubernetes would refuse in a NetworkPolicy, without naming the setting; one of many digits is the largest integer. */}}
{{- define "kvferry.validatePort" -}}
{{- $port := index . 3 | atoi -}}
{{- if or (lt $port 1) (gt $port 65535) -}}
{{- fail (printf "%s.config.%s: the port of %s must be 1 to 65535" (index . 0) (index . 1) (index . 2)) -}}
{{- end -}}
{{- end -}}

{{/* What the schema's pattern cannot say of a host of images. Of an IPv6 network, bits beyond its prefix are not looked for. */}}
{{- define "kvferry.validateImageHost" -}}
{{- $setting := printf "%s.config.router.images.allowed_hosts" (index . 0) -}}
{{- $host := index . 1 -}}
{{- $ipv4 := include "kvferry.ipv4" . -}}
{{- if regexMatch (printf "^%s:[0-9]+$" $ipv4) $host -}}
{{- fail (printf "%s: %s is an address with a port; an address allows all ports: leave the port out" $setting $host) -}}
{{- end -}}
{{- with regexFind "^[^:]+:[0-9]+$" $host -}}
{{- include "kvferry.validatePort" (list (index $ 0) "router.images.allowed_hosts" . (regexFind "[0-9]+$" .)) -}}
{{- end -}}
{{- if regexMatch "/.*[.]" $host -}}
{{- fail (printf "%s: %s has a netmask; give the number of its bits, as in 10.0.0.0/8: a NetworkPolicy takes no other form" $setting $host) -}}
{{- end -}}
{{- if regexMatch "^[^:]*:[^:]*:" $host -}}
{{- $address := regexFind "^[^%/]+" (trimAll "[]" $host) -}}
{{- $address = regexReplaceAll (printf ":%s$" $ipv4) $address ":0:0" -}}
{{- $groups := regexFindAll "[0-9A-Fa-f]+" $address -1 | len -}}
{{- $group := "[0-9A-Fa-f]{1,4}" -}}
{{- $some := printf "(%s(:%s)*)?" $group $group -}}
{{- $isShort := and (regexMatch (printf "^%s::%s$" $some $some) $address) (lt $groups 8) -}}
{{- if not (or $isShort (regexMatch (printf "^%s(:%s){7}$" $group $group) $address)) -}}
{{- fail (printf "%s: %s is no IPv6 address" $setting $host) -}}
{{- end -}}
{{- end -}}
{{- with regexFind "^[[]?([0-9]+[.]){3}[0-9]+/[0-9]+" $host -}}
{{- $address := 0 -}}
{{- range splitList "." (regexFind "[0-9.]+" .) -}}{{- $address = add (mul $address 256) (atoi .) -}}{{- end -}}
{{- $size := 1 -}}
{{- range until (sub 32 (regexFind "[0-9]+$" . | atoi) | int) -}}{{- $size = mul $size 2 -}}{{- end -}}
{{- if mod $address $size -}}
{{- fail (printf "%s: %s is no network, its address has bits beyond the prefix; clear them, as in 10.0.0.0/8" $setting $host) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "kvferry.validateEmbeddings" -}}
{{- $connector := default dict .config.ec_connector -}}
{{- $name := default "none" $connector.name -}}
{{- if not (or (has $name (list "none" "p2p" "shared")) (contains ":" $name)) -}}
{{- fail (printf "%s.config.ec_connector.name: %q is no connector of embeddings; take p2p or shared, or module:factory for one of your image" .role $name) -}}
{{- end -}}
{{- if eq $name "p2p" -}}
{{- range $connector.transports -}}
{{- if not (has . (list "tcp" "nixl" "shm")) -}}
{{- fail (printf "%s.config.ec_connector.transports: %q is no transport; take tcp" $.role .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "kvferry.validateOrder" -}}
{{- $low := float64 (index . 1) -}}
{{- $high := float64 (index . 4) -}}
{{- if or (gt $low $high) (and (eq (index . 2) "below") (eq $low $high)) -}}
{{- fail (printf "%s = %.15g must be %s %s = %.15g: lower the first or raise the second" (index . 0) $low (index . 2) (index . 3) $high) -}}
{{- end -}}
{{- end -}}

{{/* What Kubernetes itself, or a scheduler, would make of a role. */}}
{{- define "kvferry.validateWorkload" -}}
{{- $values := .values -}}
{{- $scaled := ne (dig "autoscaling" "type" "none" $values) "none" -}}
{{- if and (not $scaled) (lt (int $values.replicas) 1) -}}
{{- fail (printf "%s.replicas = 0: the role is enabled but has no pod; set it to 1 or more, or %s.enabled to false" .role .role) -}}
{{- end -}}
{{- if and (dig "autoscaling" "load" 0 $values) (ne (dig "autoscaling" "type" "none" $values) "keda") -}}
{{- fail (printf "%s.autoscaling.load: it is asked of the router's metrics, which only KEDA can; set %s.autoscaling.type to keda" .role .role) -}}
{{- end -}}
{{- if and (dig "autoscaling" "load" 0 $values) (not (has .role (list "prefill" "decode" "aggregated"))) -}}
{{- fail (printf "%s.autoscaling.load: the router knows no demand for this role; use %s.autoscaling.metrics" .role .role) -}}
{{- end -}}
{{- range $metric, $target := dig "autoscaling" "metrics" dict $values -}}
{{- if and (eq $values.autoscaling.type "keda") (regexMatch "[A-Za-z]$" (toString $target)) -}}
{{- fail (printf "%s.autoscaling.metrics.%s = %v: KEDA takes a plain number, such as 0.7" $.role $metric $target) -}}
{{- end -}}
{{- end -}}
{{- range $label, $_ := default dict $values.podLabels -}}
{{- if has $label (list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component") -}}
{{- fail (printf "%s.podLabels: %s is a label the selectors go by; use another name" $.role $label) -}}
{{- end -}}
{{- end -}}
{{- $rolling := default dict $values.rollingUpdate -}}
{{- $unavailable := trimSuffix "%" (dig "maxUnavailable" 0 $rolling | toString) -}}
{{- $surge := trimSuffix "%" (dig "maxSurge" 1 $rolling | toString) -}}
{{- if and (eq $unavailable "0") (eq $surge "0") -}}
{{- fail (printf "%s.rollingUpdate: maxUnavailable and maxSurge are both 0, so no pod could ever be replaced; set one of them to 1" .role) -}}
{{- end -}}
{{- if and $values.rollingUpdate (eq $values.kind "StatefulSet") -}}
{{- fail (printf "%s.rollingUpdate: it is for a Deployment, but %s.kind is StatefulSet; remove it" .role .role) -}}
{{- end -}}
{{- end -}}

{{- define "kvferry.validateDevices" -}}
{{- $gpu := dig "gpu" "count" 0 .values | int -}}
{{- $device := default "auto" .config.model.device -}}
{{- if gt $gpu 1 -}}
{{- fail (printf "%s.gpu.count = %d: a worker computes on one GPU, the others would idle; set it to 1 and raise %s.replicas" .role $gpu .role) -}}
{{- end -}}
{{- if and $gpu (eq $device "cpu") -}}
{{- fail (printf "%s.gpu.count = %d, but config.model.device is cpu: set it to cuda, or the GPU idles" .role $gpu) -}}
{{- end -}}
{{- if and (ne .role "encode") (ne (dig "model" "quantization" "none" .config) "none") (or $gpu (eq $device "cuda")) -}}
{{- fail (printf "%s.config.model.quantization = %s, but its pods compute on a GPU: set %s.config.model.device to cpu and %s.gpu.count to 0, or it to none" .role .config.model.quantization .role .role) -}}
{{- end -}}
{{- if and (eq $device "cuda") (eq $gpu 0) (not .values.resourceClaims) -}}
{{- fail (printf "%s.config.model.device = cuda, but its pods get no GPU: set %s.gpu.count to 1, or %s.resourceClaims" .role .role .role) -}}
{{- end -}}
{{- end -}}

{{- define "kvferry.validateModelCache" -}}
{{- $cache := .Values.modelCache -}}
{{- if and (eq $cache.kind "existingClaim") (not $cache.existingClaim) -}}
{{- fail "modelCache.existingClaim: name the claim, or set modelCache.kind to emptyDir or create" -}}
{{- end -}}
{{- if and $cache.readOnly (eq $cache.kind "emptyDir") -}}
{{- fail "modelCache.readOnly: an emptyDir starts empty, so the model must be fetched into it; use a claim that holds the model" -}}
{{- end -}}
{{- if and (eq $cache.kind "create") $cache.readOnly -}}
{{- fail "modelCache.readOnly: a claim that the chart creates is empty; use kind existingClaim with a claim that holds the model" -}}
{{- end -}}
{{- if eq $cache.kind "create" -}}
{{- $writable := or (has "ReadWriteMany" $cache.accessModes) (has "ReadWriteOnce" $cache.accessModes) -}}
{{- if not $writable -}}
{{- fail "modelCache.accessModes: nothing can be fetched into a claim that is read-only; add ReadWriteMany" -}}
{{- end -}}
{{- if not (or (has "ReadWriteMany" $cache.accessModes) $cache.singleNode) -}}
{{- fail "modelCache.accessModes: pods of several nodes cannot share a ReadWriteOnce claim; use ReadWriteMany, or set modelCache.singleNode to keep all pods on one node" -}}
{{- end -}}
{{- end -}}
{{- end -}}
